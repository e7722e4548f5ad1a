"""The backend that runs a real model, and where models come from. Everything that needs torch is in here."""
