"""Feeds every vLLM command of `pdproxy quickstart` to vLLM's own argument parser.

    flags.py PDPROXY     the path of the program

For each quickstart of the installed vLLM release, in several shapes, it checks:

- the flags, and the members of the JSON values of --kv-transfer-config,
  --kv-events-config and --ec-transfer-config: vLLM's parser refuses unknown ones;
- the names of flags in full: the parser would also accept abbreviations;
- the environment variables: vllm.envs must know each VLLM_ name;
- the connector: vLLM's factory must know its name;
- the members of kv_connector_extra_config, which vLLM does not check: each must occur as
  a text in the source of the connector, or of the package that reads it;
- the kept list of names (quickstart/testdata/vllm-RELEASE.txt), which the first tier of
  tests uses in place of vLLM: it must name nothing that vLLM does not have.
"""

import inspect
import json
import pathlib
import subprocess
import sys

import vllm
import vllm.envs
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

PDPROXY = sys.argv[1]
KEPT = pathlib.Path(__file__).parents[2] / "quickstart" / "testdata"
SOURCES = pathlib.Path(vllm.__file__).parent
SHAPES = [
    [],
    ["--prefill", "2", "--tp", "2"],
    ["--host", "10.0.0.5,10.0.0.6"],
    ["--encode", "1"],
    ["--encode", "1", "--host", "10.0.0.5,10.0.0.6"],
]
# Variables of other programs: CUDA, HIP, Python, LMCache.
FOREIGN = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTHONHASHSEED", "LMCACHE_CONFIG_FILE"}
JSON_FLAGS = {"--kv-transfer-config", "--kv-events-config", "--ec-transfer-config"}
# Packages that read the members of kv_connector_extra_config for a connector.
READERS = {"OffloadingConnector": "v1/kv_offload", "MoRIIOConnector": "distributed/kv_transfer/kv_connector/v1/moriio"}


def pdproxy(*args):
    return json.loads(subprocess.check_output([PDPROXY, "quickstart", "--json", *args]))


def members(value):
    """The names of all members of a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from members(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from members(inner)


def source_of(factory, name):
    """The file of a connector. It is not imported: its libraries may need a GPU."""
    module = inspect.getclosurevars(factory._registry[name]).nonlocals["module_path"]
    return SOURCES.parent.joinpath(*module.split(".")).with_suffix(".py")


def mentions(factory, connector, name):
    """Whether the source of a connector contains name as a text."""
    files = [source_of(factory, connector)]
    if connector in READERS:
        files += (SOURCES / READERS[connector]).rglob("*.py")
    return any(f'"{name}"' in f.read_text() for f in files)


def check_command(parser, engine):
    command = engine["command"]
    if command[:2] != ["vllm", "serve"]:
        raise SystemExit(f"{engine['name']}: not a command of vLLM: {command}")
    args = command[2:]
    parser.parse_args(args)  # ends the program if vLLM refuses the command
    found = 0
    for i, flag in enumerate(args):
        if not flag.startswith("--"):
            continue
        found += 1
        if flag not in parser._option_string_actions:
            raise SystemExit(f"{engine['name']}: {flag} is no full name of a flag")
        if flag not in JSON_FLAGS:
            continue
        value = json.loads(args[i + 1])
        for kind, factory in (("kv", KVConnectorFactory), ("ec", ECConnectorFactory)):
            name = value.get(f"{kind}_connector")
            if name is None:
                continue
            if name not in factory._registry:
                raise SystemExit(f"{engine['name']}: vLLM has no connector {name}")
            for member in members(value.get(f"{kind}_connector_extra_config", {})):
                found += 1
                if not mentions(factory, name, member):
                    raise SystemExit(f"{engine['name']}: {name} does not read {member}")
    for variable in engine["env"]:
        found += 1
        name = variable.split("=", 1)[0]
        if name not in vllm.envs.environment_variables and name not in FOREIGN:
            raise SystemExit(f"{engine['name']}: vLLM has no variable {name}")
    return found


def check_kept(parser, release):
    """Compares the kept list with vLLM."""
    for line in (KEPT / f"vllm-{release}.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        kind, name = line.split()[:2]
        if kind == "flag" and name not in parser._option_string_actions:
            raise SystemExit(f"the kept list has {name}, vLLM does not")
        if kind == "env" and name not in vllm.envs.environment_variables and name not in FOREIGN:
            raise SystemExit(f"the kept list has {name}, vLLM does not")


def main():
    release = vllm.__version__.split("+")[0]
    parser = make_arg_parser(FlexibleArgumentParser())
    names = commands = 0
    for entry in pdproxy():
        for shape in SHAPES:
            if "--encode" in shape and not entry["connector"].startswith("vllm-"):
                continue
            try:
                plan = pdproxy(entry["name"], *shape)
            except subprocess.CalledProcessError:
                if "--encode" in shape:
                    continue  # a quickstart without encoders
                raise
            if plan["release"] != f"vLLM {release}":
                continue
            for engine in plan["engines"]:
                names += check_command(parser, engine)
                commands += 1
    if commands < 90:
        raise SystemExit(f"only {commands} commands for vLLM {release}")
    check_kept(parser, release)
    print(f"flags.py: vLLM {release} accepts {commands} commands with {names} flags, members and variables")


main()
