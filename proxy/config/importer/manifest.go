package importer

import (
	"bytes"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// containerWords returns the words of a container's command and args. A script of sh -c is split
// as by a shell.
func (y *yamlFile) containerWords(t *table) []word {
	var words []word
	for _, key := range []string{"command", "args"} {
		nodes, _, _ := y.list(t, key)
		script := false
		for _, w := range scalars(y, nodes, t.name(key)) {
			script = script || strings.ContainsAny(w.text, "\n") || strings.Contains(w.text, " -") && !isFlag(w)
			if !script {
				words = append(words, w)
				continue
			}
			r := wordReader{report: &report{}, text: w.text, line: w.line + 1, script: true}
			words = append(words, r.split()...)
		}
	}
	return words
}

// manifestWords returns the arguments of the container that runs one of these programs, if the
// file is a manifest of Kubernetes.
func manifestWords(r *report, f File, programs []string) ([]word, bool) {
	documents, isManifest := manifestDocuments(f)
	if !isManifest {
		return nil, false
	}
	y := &yamlFile{report: r, file: f.Name}
	for _, d := range documents {
		for _, c := range containers(d, maxNesting+maxNesting) {
			t := y.table("containers", c)
			words := y.containerWords(t)
			if runs(words, programs) || named(t, programs) && len(words) > 0 {
				return arguments(words, programs), true
			}
		}
	}
	if len(r.problems) == 0 {
		r.problem(f.Name, 0, "", "the file is a Kubernetes manifest, and no container in it runs %s: give the arguments of the container, one a line", programs[0])
	}
	return nil, true
}

// manifestDocuments returns the documents of a file of Kubernetes objects.
func manifestDocuments(f File) (documents []*yaml.Node, isManifest bool) {
	if len(f.Text) > maxText {
		return nil, false
	}
	for decoder := yaml.NewDecoder(bytes.NewReader(f.Text)); ; {
		var root yaml.Node
		if decoder.Decode(&root) != nil {
			return documents, isManifest
		}
		if len(root.Content) == 0 || root.Content[0].Kind != yaml.MappingNode {
			continue
		}
		documents = append(documents, root.Content[0])
		isManifest = isManifest || member(root.Content[0], "apiVersion") != nil && member(root.Content[0], "kind") != nil
	}
}

// member returns the value of a key of a mapping, nil: none.
func member(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Kind == yaml.MappingNode && n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// containers returns the containers within a node. It follows no alias.
func containers(n *yaml.Node, depth int) []*yaml.Node {
	var found []*yaml.Node
	if n.Kind != yaml.MappingNode || depth == 0 {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, v := n.Content[i].Value, n.Content[i+1]
		switch {
		case (key == "containers" || key == "initContainers") && v.Kind == yaml.SequenceNode:
			for _, c := range v.Content {
				if c.Kind == yaml.MappingNode {
					found = append(found, c)
				}
			}
		default:
			found = append(found, containers(v, depth-1)...)
		}
	}
	return found
}

// runs reports whether a command names one of the programs.
func runs(words []word, programs []string) bool {
	return slices.ContainsFunc(words, func(w word) bool {
		return slices.Contains(programs, w.text[strings.LastIndexByte(w.text, '/')+1:])
	})
}

// named reports whether the image or the name of a container contains the name of one of the
// programs, which the image then starts.
func named(t *table, programs []string) bool {
	for _, key := range []string{"image", "name"} {
		e, found := t.find(key)
		for _, program := range programs {
			if found && !strings.HasSuffix(program, ".py") && strings.Contains(resolve(e.value).Value, program) {
				return true
			}
		}
	}
	return false
}
