//go:build linux

package kubelet

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// user is the user of the image.
const user = 65532

// Node runs pods.
type Node struct {
	// Program is the program of the image, without shared libraries.
	Program string
	// Content returns the data of a ConfigMap or Secret.
	Content func(kind, namespace, name string) (map[string][]byte, error)
	// Account returns the files of a ServiceAccount; nil = pods have no account.
	Account func(namespace, name string) (map[string][]byte, error)
	// Env are variables of each container.
	Env []string
	// System mounts /proc and /dev in each pod, as the processes of a fleet need. It needs root.
	System bool
}

// Running is a pod that runs.
type Running struct {
	Pod  Pod
	node *Node
	ip   string
	net  string // path of the network namespace; "" = that of the test
	root string

	mu        sync.Mutex
	processes []*process // in the order of their starts; guarded by mu
}

// process is a container that runs, or has run.
type process struct {
	container string
	cmd       *exec.Cmd
	log       testbed.Log
	err       error         // of Wait; valid when ended is closed
	ended     chan struct{} // closed when the process has ended
}

// Run starts a pod: its init containers one after the other, then its containers. They end with
// the test. The pod has the address ip in the network namespace whose path is network.
func (n *Node) Run(t testing.TB, pod Pod, ip, network string) (*Running, error) {
	t.Helper()
	r := &Running{Pod: pod, node: n, ip: ip, net: network, root: t.TempDir()}
	if err := r.image(); err != nil {
		return nil, err
	}
	if n.System {
		for _, name := range []string{"proc", "dev"} {
			if err := r.mount(t, name); err != nil {
				return nil, err
			}
		}
	}
	t.Cleanup(func() {
		r.signal(syscall.SIGKILL)
		r.wait()
	})
	for _, c := range pod.Spec.InitContainers {
		p, err := r.start(c)
		if err == nil {
			<-p.ended
			err = p.err
		}
		if err != nil {
			return r, fmt.Errorf("init container %s: %w\n%s", c.Name, err, r.Log(c.Name))
		}
	}
	for _, c := range pod.Spec.Containers {
		if _, err := r.start(c); err != nil {
			return r, fmt.Errorf("container %s: %w", c.Name, err)
		}
	}
	return r, nil
}

// mount mounts a folder of the machine at the same place in the pod, until the end of the test.
func (r *Running) mount(t testing.TB, name string) error {
	at := filepath.Join(r.root, name)
	if err := errors.Join(r.folder(name, 0o755), unix.Mount("/"+name, at, "", unix.MS_BIND, "")); err != nil {
		return fmt.Errorf("mount /%s: %w", name, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount /%s: %v", name, err)
		}
	})
	return nil
}

// image makes the files of the image, as deploy/release/image does, and of the volumes.
func (r *Running) image() error {
	for path, mode := range map[string]os.FileMode{"run/pdproxy": 0o700, "tmp": 0o777 | os.ModeSticky, "var/cache/pdproxy": 0o700} {
		if err := r.folder(path, mode); err != nil {
			return err
		}
	}
	// A copy, because the program of the test may be on another file system, or not readable for user.
	program, err := os.ReadFile(r.node.Program)
	if err == nil {
		err = r.file("pdproxy", program, 0o755)
	}
	if err != nil {
		return err
	}
	if r.node.Account != nil {
		files, err := r.node.Account(r.Pod.Metadata.Namespace, r.Pod.Spec.ServiceAccountName)
		if err != nil {
			return err
		}
		if err := r.files("var/run/secrets/kubernetes.io/serviceaccount", files); err != nil {
			return err
		}
	}
	paths := map[string]string{}
	for _, c := range append(r.Pod.Spec.InitContainers, r.Pod.Spec.Containers...) {
		for _, m := range c.VolumeMounts {
			if at, ok := paths[m.Name]; ok && at != m.MountPath {
				return fmt.Errorf("volume %s is at %s and %s: a Node has one place for each volume", m.Name, at, m.MountPath)
			}
			paths[m.Name] = m.MountPath
		}
	}
	for _, v := range r.Pod.Spec.Volumes {
		if err := r.volume(v, paths[v.Name]); err != nil {
			return fmt.Errorf("volume %s: %w", v.Name, err)
		}
	}
	return nil
}

// volume makes the files of a volume.
func (r *Running) volume(v Volume, path string) error {
	namespace := r.Pod.Metadata.Namespace
	switch {
	case v.ConfigMap != nil:
		files, err := r.node.Content("ConfigMap", namespace, v.ConfigMap.Name)
		return errors.Join(err, r.files(path, files))
	case v.Secret != nil:
		files, err := r.node.Content("Secret", namespace, v.Secret.SecretName)
		if err == nil && len(v.Secret.Items) > 0 {
			all := files
			files = map[string][]byte{}
			for _, item := range v.Secret.Items {
				text, ok := all[item.Key]
				if !ok {
					return fmt.Errorf("secret %s has no key %s", v.Secret.SecretName, item.Key)
				}
				files[item.Path] = text
			}
		}
		return errors.Join(err, r.files(path, files))
	case v.EmptyDir != nil && v.EmptyDir.Medium == "Memory":
		return r.folder(path, 0o777|os.ModeSticky)
	case v.EmptyDir != nil:
		return r.folder(path, 0o777)
	}
	return errors.New("a Node cannot make this kind of volume")
}

func (r *Running) files(path string, files map[string][]byte) error {
	if err := r.folder(path, 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := r.file(filepath.Join(path, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (r *Running) file(path string, text []byte, mode os.FileMode) error {
	return os.WriteFile(filepath.Join(r.root, path), text, mode)
}

// folder makes a folder. One that only its owner may use belongs to the user of the image.
func (r *Running) folder(path string, mode os.FileMode) error {
	path = filepath.Join(r.root, path)
	err := os.MkdirAll(path, 0o755)
	if err == nil {
		err = os.Chmod(path, mode) // without the umask
	}
	if err == nil && mode.Perm() == 0o700 && root() {
		err = os.Chown(path, user, user)
	}
	return err
}

// root reports whether processes can get the user of the image. In a user namespace with one
// user, they keep the user of the test.
func root() bool {
	var id, outside, size int
	text, err := os.ReadFile("/proc/self/uid_map")
	if err == nil {
		_, err = fmt.Sscan(string(text), &id, &outside, &size)
	}
	return err == nil && os.Geteuid() == 0 && size > user
}

// start starts a container.
func (r *Running) start(c Container) (*process, error) {
	env := append(c.environment(r.ip), r.node.Env...)
	p := &process{container: c.Name, cmd: exec.Command("/pdproxy", c.arguments(env)...), ended: make(chan struct{})}
	p.cmd.Env, p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = env, "/", &p.log, &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: r.root, Setpgid: true}
	if root() {
		p.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: user, Gid: user}
	}
	if err := within(r.net, p.cmd.Start); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.processes = append(r.processes, p)
	r.mu.Unlock()
	go func() { // ends with the process, which the test's cleanup kills
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// within calls f on a thread of a network namespace.
func within(network string, f func() error) error {
	if network == "" {
		return f()
	}
	target, err := os.Open(network)
	if err != nil {
		return err
	}
	defer target.Close()
	runtime.LockOSThread() // locked until the thread is in its own namespace again
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer own.Close()
	if err = unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err == nil {
		err = f()
	}
	if back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); back != nil {
		return errors.Join(err, back)
	}
	runtime.UnlockOSThread()
	return err
}

// Log returns the output of a container.
func (r *Running) Log(container string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.processes {
		if p.container == container {
			return p.log.String()
		}
	}
	return ""
}

// Started reports whether all containers run.
func (r *Running) Started() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	running := 0
	for _, p := range r.processes {
		select {
		case <-p.ended:
		default:
			running++
		}
	}
	return running == len(r.Pod.Spec.Containers)
}

// Ready reports whether all readiness probes of the pod succeed.
func (r *Running) Ready() bool {
	for _, c := range r.Pod.Spec.Containers {
		if c.ReadinessProbe.HTTPGet.Path != "" && r.Probe(c, c.ReadinessProbe) != http.StatusOK {
			return false
		}
	}
	return true
}

// Probe returns the status of a probe; 0 without an answer.
func (r *Running) Probe(c Container, p Probe) int {
	port := fmt.Sprint(p.HTTPGet.Port)
	if _, err := strconv.Atoi(port); err != nil {
		port = strconv.Itoa(c.Port(port))
	}
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + net.JoinHostPort(r.ip, port) + p.HTTPGet.Path)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// Stop ends the pod as a kubelet does, and returns the exit status of its last container.
func (r *Running) Stop() int {
	for _, c := range r.Pod.Spec.Containers {
		time.Sleep(time.Duration(c.Lifecycle.PreStop.Sleep.Seconds) * time.Second)
	}
	r.signal(syscall.SIGTERM)
	kill := time.AfterFunc(time.Duration(r.Pod.Spec.TerminationGracePeriodSeconds)*time.Second, func() { r.signal(syscall.SIGKILL) })
	defer kill.Stop()
	return r.wait()
}

// wait waits for the end of all containers, and returns the exit status of the last one.
func (r *Running) wait() int {
	r.mu.Lock()
	processes := r.processes
	r.mu.Unlock()
	status := -1
	for _, p := range processes {
		<-p.ended
		status = p.cmd.ProcessState.ExitCode()
	}
	return status
}

// signal sends a signal to the containers.
func (r *Running) signal(s syscall.Signal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.processes {
		select {
		case <-p.ended:
		default:
			_ = p.cmd.Process.Signal(s) // it may have ended
		}
	}
}
