"""Published serving runs: rows of tables as measured runs, the servers behind them, and what those were told."""
