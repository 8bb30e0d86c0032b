"""Text as data: what ingest, clean, tokenize and evaluate share."""
