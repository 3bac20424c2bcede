"""What every kind of benchmark is measured with: settings, arms, pairs, timing, records."""
