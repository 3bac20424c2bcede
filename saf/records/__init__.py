"""Files, folders, events and results: how everything that lasts is written whole, read back, traced and shown."""
