"""What K3 reads: tokenizer, corpora, packing, pictures."""
