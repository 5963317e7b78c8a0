"""What trainer, engine and operator agree on: values and pure functions, standard library only.

Modules: ``errors`` (the exception tree), ``endpoints`` (addresses), ``tables`` (what an engine publishes),
``digest`` (checksum of raw bytes), ``assignment`` (who writes what, as a document), ``planner`` (who should),
``protocol`` (names both ends use on the wire), ``libraries`` (transport libraries, imported when first needed).
"""
