"""Device code: leaves that import nothing of ours and are imported only when first used."""
