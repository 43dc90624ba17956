"""python -m ovspec"""

from ovspec.cli import main

main()
