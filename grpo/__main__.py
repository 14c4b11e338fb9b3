"""`python -m grpo`: the same command as `grpo.train`."""

from grpo.train import main

if __name__ == "__main__":
    main()
