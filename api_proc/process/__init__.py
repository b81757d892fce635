"""What an API process does around its application: its start, its background work, its commands."""
