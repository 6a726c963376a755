"""What both workers are: the checks of requests, the skeleton of services and processes."""
