package kubelet

import (
	"encoding/json"
	"strings"
)

// Pod has the fields of a pod, or of the template of a Deployment, that a Node uses.
type Pod struct {
	Metadata struct{ Name, Namespace string }
	Spec     struct {
		InitContainers, Containers    []Container
		Volumes                       []Volume
		ServiceAccountName            string
		TerminationGracePeriodSeconds int
	}
}

// Container is a container of a pod.
type Container struct {
	Name, Image string
	Args        []string
	Env         []struct {
		Name, Value string
		ValueFrom   struct{ FieldRef struct{ FieldPath string } }
	}
	Ports []struct {
		Name          string
		ContainerPort int
	}
	Lifecycle struct {
		PreStop struct{ Sleep struct{ Seconds int } }
	}
	LivenessProbe, ReadinessProbe Probe
	VolumeMounts                  []struct{ Name, MountPath string }
}

// Probe is an HTTP probe of a container. Port is a number, or the name of a port.
type Probe struct {
	HTTPGet struct {
		Path string
		Port any
	}
}

// Volume is a volume of a pod.
type Volume struct {
	Name      string
	ConfigMap *struct{ Name string }
	Secret    *struct {
		SecretName string
		Items      []struct{ Key, Path string }
	}
	EmptyDir *struct{ Medium string }
}

// Read returns the pod of a decoded object: a pod, or the template of a Deployment.
func Read(object map[string]any) (Pod, error) {
	var p Pod
	data, err := json.Marshal(object)
	if err == nil {
		err = json.Unmarshal(data, &p)
	}
	return p, err
}

// Port returns the port of a name; 0 if the container has none.
func (c Container) Port(name string) int {
	for _, p := range c.Ports {
		if p.Name == name {
			return p.ContainerPort
		}
	}
	return 0
}

// environment returns the variables of a container in a pod with an address.
func (c Container) environment(ip string) (env []string) {
	for _, v := range c.Env {
		if v.ValueFrom.FieldRef.FieldPath == "status.podIP" {
			v.Value = ip
		}
		env = append(env, v.Name+"="+v.Value)
	}
	return env
}

// arguments returns the arguments of a container, with $(NAME) replaced by the variables.
func (c Container) arguments(env []string) (args []string) {
	var pairs []string
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		pairs = append(pairs, "$("+name+")", value)
	}
	r := strings.NewReplacer(pairs...)
	for _, arg := range c.Args {
		args = append(args, r.Replace(arg))
	}
	return args
}
