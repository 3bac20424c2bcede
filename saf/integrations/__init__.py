"""Modules to import with other libraries, named after them; each adds support for frozen heads to its library."""
