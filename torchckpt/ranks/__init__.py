"""What processes tell each other, whether or not they have a pipeline.

    turns             each tells the others something, and who does not come is found out
    private           the private names of torch's that this needs
"""
__all__: list[str] = []
