"""What numbers a model uses outside of training: the files and formats of other engines."""
