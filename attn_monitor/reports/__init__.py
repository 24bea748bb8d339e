"""What is made of runs afterwards: reading event files, the summary on the terminal, the page that can be mailed."""
