"""Ranks: the processes of one trainer, which make its steps together, each with a share of every batch.

Rank 0 is the run's trainer: it alone reads and answers the broker, and says what is done next (`orders.py`). The others
follow (`follower.py`). All exchange bytes and sums over groups of their own (`channel.py`), and each learns within a
moment that another has failed (`alarm.py`).
"""
