"""The privacy ledger: events, guarantees and the file that records them."""
