ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -- hostname1 'exec bash -s'
ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -- hostname2 'exec bash -s'
ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -- hostname3 'exec bash -s'
ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -- hostname4 'exec bash -s'
