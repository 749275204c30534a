"""The ladder below K3: softmax attention, linear attention, the delta rule. What K3 is measured against."""
