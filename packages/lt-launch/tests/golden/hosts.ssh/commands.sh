ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 hostname1 '/data/venv/bin/python -c '"'"'import sys
sys.path = [path for path in sys.path if path]
import json, os, signal, sys
signal.alarm(60)
data = b""
while b"\n" not in data or len(data) < int(data.split(b"\n")[0]) + data.index(b"\n") + 1:
    piece = os.read(0, 1 << 16)
    if not piece: sys.exit(0)
    data += piece
order = json.loads(data[data.index(b"\n") + 1:])
try:
    if order["cwd"]: os.chdir(order["cwd"])
    for name, text in order["files"].items():
        path = os.path.join(order["launch"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = "%s.%s.tmp" % (path, os.urandom(8).hex())
        with open(part, "x", encoding="utf-8") as file: file.write(text)
        os.replace(part, path)
except OSError as exc:
    print(json.dumps({"refused": "%s: %s" % (exc.filename, exc.strerror)}))
    sys.exit(64)
signal.alarm(0)
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(order["launch"], "nodes"))
from lt_launch.ssh_node import main
main()'"'"''
ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 hostname2 '/data/venv/bin/python -c '"'"'import sys
sys.path = [path for path in sys.path if path]
import json, os, signal, sys
signal.alarm(60)
data = b""
while b"\n" not in data or len(data) < int(data.split(b"\n")[0]) + data.index(b"\n") + 1:
    piece = os.read(0, 1 << 16)
    if not piece: sys.exit(0)
    data += piece
order = json.loads(data[data.index(b"\n") + 1:])
try:
    if order["cwd"]: os.chdir(order["cwd"])
    for name, text in order["files"].items():
        path = os.path.join(order["launch"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = "%s.%s.tmp" % (path, os.urandom(8).hex())
        with open(part, "x", encoding="utf-8") as file: file.write(text)
        os.replace(part, path)
except OSError as exc:
    print(json.dumps({"refused": "%s: %s" % (exc.filename, exc.strerror)}))
    sys.exit(64)
signal.alarm(0)
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(order["launch"], "nodes"))
from lt_launch.ssh_node import main
main()'"'"''
ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 hostname3 '/data/venv/bin/python -c '"'"'import sys
sys.path = [path for path in sys.path if path]
import json, os, signal, sys
signal.alarm(60)
data = b""
while b"\n" not in data or len(data) < int(data.split(b"\n")[0]) + data.index(b"\n") + 1:
    piece = os.read(0, 1 << 16)
    if not piece: sys.exit(0)
    data += piece
order = json.loads(data[data.index(b"\n") + 1:])
try:
    if order["cwd"]: os.chdir(order["cwd"])
    for name, text in order["files"].items():
        path = os.path.join(order["launch"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = "%s.%s.tmp" % (path, os.urandom(8).hex())
        with open(part, "x", encoding="utf-8") as file: file.write(text)
        os.replace(part, path)
except OSError as exc:
    print(json.dumps({"refused": "%s: %s" % (exc.filename, exc.strerror)}))
    sys.exit(64)
signal.alarm(0)
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(order["launch"], "nodes"))
from lt_launch.ssh_node import main
main()'"'"''
ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 hostname4 '/data/venv/bin/python -c '"'"'import sys
sys.path = [path for path in sys.path if path]
import json, os, signal, sys
signal.alarm(60)
data = b""
while b"\n" not in data or len(data) < int(data.split(b"\n")[0]) + data.index(b"\n") + 1:
    piece = os.read(0, 1 << 16)
    if not piece: sys.exit(0)
    data += piece
order = json.loads(data[data.index(b"\n") + 1:])
try:
    if order["cwd"]: os.chdir(order["cwd"])
    for name, text in order["files"].items():
        path = os.path.join(order["launch"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = "%s.%s.tmp" % (path, os.urandom(8).hex())
        with open(part, "x", encoding="utf-8") as file: file.write(text)
        os.replace(part, path)
except OSError as exc:
    print(json.dumps({"refused": "%s: %s" % (exc.filename, exc.strerror)}))
    sys.exit(64)
signal.alarm(0)
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(order["launch"], "nodes"))
from lt_launch.ssh_node import main
main()'"'"''
