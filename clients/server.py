"""Starts the server that the tests speak to: the demo model, on a free port."""

import os
import re
import signal
import subprocess
import time
import urllib.request

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The name of the city"}},
    "required": ["city"],
}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": WEATHER},
}
HELLO = "Hello! How can I help you today?"


class Server:
    def __init__(self, *flags):
        command = [os.environ["CARAT"], "serve", "--port", "0", *(flags or ["--parallel", "4"])]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = None
        for line in self.process.stderr:
            found = re.search(r"listening on (http://\S+),", line)
            if found:
                self.url = found.group(1)
            if "ready after" in line:
                break
        if self.url is None:
            raise RuntimeError("the server did not start")

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def gauge(self, name):
        for line in self.get("/metrics").splitlines():
            if line.startswith("carat:" + name + "{"):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def wait_idle(self, seconds=60):
        """Whether nothing runs any more, within that time: long, for machines that do much else besides."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.gauge("num_requests_running") == 0 and self.gauge("num_requests_waiting") == 0:
                return True
            time.sleep(0.01)
        return False

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=20)
        self.process.stderr.close()
