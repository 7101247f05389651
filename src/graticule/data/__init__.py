"""From files to samples: ingest, store, statistics, samples, loader, demo planet."""
