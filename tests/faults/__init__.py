"""What fails, wherever it fails, costs that step and nothing else.

    gpt, tools        a small GPT, and a training step of it for each tool of the library: the table ``TOOLS``
    operations        raises at the n-th operator; which storages and random states there should be afterwards
    test_operations   an exception at every operator of a step; ``make test`` has a cross-section
    test_threads      four threads with models of their own
    test_ranks        ranks that are killed, stopped or raise, in every phase of a schedule
    soak              ``make soak``: memory stays flat
"""
