"""Recurrent layers over states in the KV pool."""
