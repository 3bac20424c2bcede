"""Files, folders and provenance: how everything that lasts is written whole, read back and traced."""
