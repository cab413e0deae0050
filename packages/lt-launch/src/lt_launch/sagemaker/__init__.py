"""SageMaker training jobs, from both sides.

The client makes and checks CreateTrainingJob requests (`request`, `constraints`, `client`); the container's entry keeps
the contract of `/opt/ml` (`contract`, `entry`); the publisher prints CreateAlgorithm (`algorithm`); and `local` keeps
the service's side of the contract with processes of this machine. boto3 is imported in `aws` alone.
"""
