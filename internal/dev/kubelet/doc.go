// Package kubelet runs the containers of pods as processes of this machine, for tests without a
// kubelet and without images. A container is a program in a root folder that has the files of the
// image and the volumes of the pod. Limits of resources have no effect.
package kubelet
