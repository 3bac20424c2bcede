"""Other libraries, by the names under which users import what this package adds to them."""
