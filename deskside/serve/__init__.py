"""Using a trained model: evaluation, export and chat from the command line."""
