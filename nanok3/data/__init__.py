"""What K3 reads: tokenizer, corpora, packing, pictures."""

from nanok3.data.corpus import Document, documents

__all__ = ["Document", "documents"]
