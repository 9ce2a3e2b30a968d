"""The parts of ``train_gpt.py``: text, model, variants, memory, table, picture."""
