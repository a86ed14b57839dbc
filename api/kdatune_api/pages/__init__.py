"""The dashboard: pages for people, on the same process as the API."""
