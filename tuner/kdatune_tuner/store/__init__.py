"""Database models, engine, queries and the one write path."""
