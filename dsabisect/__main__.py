from dsabisect.cli import main

main()
