"""Other formats in and out. Each module states what it keeps and what it refuses."""
