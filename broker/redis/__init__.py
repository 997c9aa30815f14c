"""The broker on Redis or Valkey: streams with consumer groups, and scripts for whatever must happen at once."""
