package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// Replacements for two commands of SLURM, with the features that the script
// uses. A node is a loopback address.
const (
	fakeScontrol = `#!/bin/sh
[ "$1 $2 $3" = "show hostnames $SLURM_JOB_NODELIST" ] || exit 1
echo "$SLURM_JOB_NODELIST" | tr , '\n'
`
	fakeSrun = `#!/bin/sh
node=
for a in "$@"; do
	case $a in
	--nodelist=*) node=${a#--nodelist=} ;;
	--nodes=1 | --ntasks=1 | --overlap | --job-name=* | --gpus=1) ;;
	-*) echo "srun: unknown option $a" >&2; exit 1 ;;
	*) break ;;
	esac
	shift
done
case ,$SLURM_JOB_NODELIST, in *,$node,*) ;; *) echo "srun: $node is not in the job" >&2; exit 1 ;; esac
exec "$@"
`
	simCommand = `exec "$SIM" sim --connector "$CONNECTOR" --role $ROLE --listen $HOST:$PORT --side-channel-port $SIDE_PORT`
)

// slurmJob submits the script for the nodes.
func slurmJob(t *testing.T, nodes []string, port int, env ...string) (job *process, work, url string) {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "bin/srun"), fakeSrun, 0o755)
	write(t, filepath.Join(dir, "bin/scontrol"), fakeScontrol, 0o755)
	listen := "127.0.0.1:" + strconv.Itoa(testbed.Ports(t, 2, "127.0.0.1"))
	base := write(t, filepath.Join(dir, "base.toml"), fmt.Sprintf(
		"[server]\nlisten = %q\nexpose_placement = true\n[admin]\nlisten = \"127.0.0.1:0\"\n[health]\ninterval = \"100ms\"\n", listen), 0o644)
	work = filepath.Join(dir, "pdproxy-7")
	job = start(t, append([]string{
		"PATH=" + filepath.Join(dir, "bin") + ":" + os.Getenv("PATH"),
		"SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=" + strings.Join(nodes, ","), "SLURM_SUBMIT_DIR=" + dir,
		"PDPROXY=" + pdproxy, "SIM=" + pdproxy, "CONNECTOR=vllm-nixl", "BASE_CONFIG=" + base,
		"PREFILL_COMMAND=" + simCommand, "DECODE_COMMAND=" + simCommand,
		"PORT=" + strconv.Itoa(port), "SIDE_PORT=" + strconv.Itoa(port+10), "SRUN_ENGINE=--gpus=1",
	}, env...), filepath.Join(recipes, "slurm/pdproxy.sbatch"))
	t.Cleanup(func() {
		if t.Failed() {
			logs, _ := filepath.Glob(filepath.Join(work, "*"))
			for _, name := range logs {
				text, _ := os.ReadFile(name)
				t.Logf("%s:\n%s", name, text)
			}
		}
	})
	return job, work, "http://" + listen
}

// TestSLURM: four engines on two nodes, and the proxy; then the job gets the
// signal to end.
func TestSLURM(t *testing.T) {
	nodes := []string{"127.0.0.2", "127.0.0.3"}
	port := testbed.Ports(t, 20, nodes...)
	job, work, url := slurmJob(t, nodes, port, "ENGINES_PER_NODE=2", "PREFILL=2")
	ready(t, url)
	decodes := map[string]bool{}
	eventually(t, "all decode engines serve", func() bool {
		text, prefill, decode := chat(t, url)
		if text == "" || !slices.Contains([]string{"p0", "p1"}, prefill) {
			t.Fatalf("%q by %s and %s", text, prefill, decode)
		}
		decodes[decode] = true
		return decodes["d0"] && decodes["d1"]
	})
	config, err := os.ReadFile(filepath.Join(work, "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	for n, want := range []string{
		fmt.Sprintf("name = \"p0\"\nurl = \"http://127.0.0.2:%d\"\nrole = \"prefill\"", port),
		fmt.Sprintf("name = \"p1\"\nurl = \"http://127.0.0.2:%d\"\nrole = \"prefill\"", port+1),
		fmt.Sprintf("name = \"d0\"\nurl = \"http://127.0.0.3:%d\"\nrole = \"decode\"", port),
		fmt.Sprintf("name = \"d1\"\nurl = \"http://127.0.0.3:%d\"\nrole = \"decode\"", port+1),
	} {
		if !strings.Contains(string(config), want) {
			t.Errorf("engine %d: no %q in\n%s", n, want, config)
		}
	}
	job.signal(syscall.SIGTERM)
	if status := job.ended(); status != 0 {
		t.Errorf("the job ended with %d", status)
	}
	for n := range 2 {
		for _, node := range nodes {
			if status(fmt.Sprintf("http://%s:%d/health", node, port+n)) != 0 {
				t.Errorf("the engine on %s:%d outlived the job", node, port+n)
			}
		}
	}
}

// TestSLURMEngineEnds: the job continues when an engine ends, and ends when the
// proxy does.
func TestSLURMEngineEnds(t *testing.T) {
	nodes := []string{"127.0.0.4", "127.0.0.5", "127.0.0.6"}
	port := testbed.Ports(t, 20, nodes...)
	flag := filepath.Join(t.TempDir(), "end")
	job, _, url := slurmJob(t, nodes, port, "END="+flag,
		`DECODE_COMMAND=if [ $NAME = d1 ]; then (until [ -e "$END" ]; do sleep 0.1; done; kill $$) & fi; `+simCommand)
	ready(t, url)
	eventually(t, "d1 is there", func() bool { return status(fmt.Sprintf("http://127.0.0.6:%d/health", port)) == 200 })
	write(t, flag, "", 0o644)
	eventually(t, "d1 has ended", func() bool { return status(fmt.Sprintf("http://127.0.0.6:%d/health", port)) == 0 })
	for range 3 {
		if _, _, decode := chat(t, url); decode != "d0" {
			t.Errorf("decoded by %s", decode)
		}
	}
	job.signal(syscall.SIGTERM)
	if status := job.ended(); status != 0 {
		t.Errorf("the job ended with %d", status)
	}
}

// TestSLURMRefuses: an invalid job ends before an engine starts.
func TestSLURMRefuses(t *testing.T) {
	nodes := []string{"127.0.0.7", "127.0.0.8"}
	for name, env := range map[string]string{
		"no decode":   "PREFILL=2",
		"no prefill":  "PREFILL=0",
		"a wrong key": "ENGINE_KEYS=rank = 2",
	} {
		t.Run(name, func(t *testing.T) {
			port := testbed.Ports(t, 20, nodes...)
			job, work, _ := slurmJob(t, nodes, port, env)
			if status := job.ended(); status != 2 {
				t.Errorf("the job ended with %d", status)
			}
			if logs, _ := filepath.Glob(filepath.Join(work, "*.log")); len(logs) > 0 {
				t.Errorf("tasks were started: %v", logs)
			}
		})
	}
}
