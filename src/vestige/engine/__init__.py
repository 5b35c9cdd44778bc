"""The order of events: from a plain model, optimizer and loader to private ones."""
