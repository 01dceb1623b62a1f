"""``offbeat store``: a TCPStore outside the workers, which numbers them and shows how a run goes.

``runs`` reads the signs of all processes and answers them, ``status`` says what they come to, in a
table or as JSON, and ``page`` serves it to browsers.
"""

from offbeat.store.page import served
from offbeat.store.runs import Runs
from offbeat.store.status import History, Status

__all__ = ["History", "Runs", "Status", "served"]
