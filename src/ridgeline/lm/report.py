"""stub"""


def arguments(parser):
    pass


def main(options):
    return 0
