// Command genproto compiles the .proto files of a directory to Go beside them, with plugins of
// pinned versions (go.mod). It needs no protoc. Usage: go run . DIRECTORY FILE...
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// fast are the messages of place.proto whose code keeps memory for the next message.
var fast = []string{"Place", "Header", "Instances", "Chain", "Turn", "Placed", "Fallback", "LeaseUpdate", "Computed"}

// parameter returns the plugin's parameter for a file; false: the plugin does not run for it.
func parameter(plugin, file string) (parameter string, ok bool) {
	if plugin == "protoc-gen-go" {
		return "paths=source_relative", true
	}
	parameter = "paths=source_relative,features=marshal+unmarshal_unsafe+size+pool"
	for _, m := range fast {
		parameter += ",pool=github.com/pdproxy/pdproxy/proxy/fleetpb." + m
	}
	return parameter, file == "place.proto"
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: genproto DIRECTORY FILE...")
		os.Exit(2)
	}
	for _, file := range os.Args[2:] {
		if err := generate(os.Args[1], file); err != nil {
			fmt.Fprintln(os.Stderr, "genproto:", err)
			os.Exit(1)
		}
	}
}

func generate(dir, file string) error {
	compiler := protocompile.Compiler{
		Resolver:       &protocompile.SourceResolver{ImportPaths: []string{dir}},
		SourceInfoMode: protocompile.SourceInfoStandard, // for the comments
	}
	files, err := compiler.Compile(context.Background(), file)
	if err != nil {
		return err
	}
	descriptor := protoutil.ProtoFromFileDescriptor(files[0])
	for _, plugin := range []string{"protoc-gen-go", "protoc-gen-go-vtproto"} {
		parameter, ok := parameter(plugin, file)
		if !ok {
			continue
		}
		request, err := proto.Marshal(&pluginpb.CodeGeneratorRequest{
			FileToGenerate: []string{file}, Parameter: &parameter, ProtoFile: []*descriptorpb.FileDescriptorProto{descriptor},
		})
		if err != nil {
			return err
		}
		cmd := exec.Command("go", "tool", plugin)
		cmd.Stdin, cmd.Stderr = bytes.NewReader(request), os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%s: %w", plugin, err)
		}
		var response pluginpb.CodeGeneratorResponse
		if err := proto.Unmarshal(out, &response); err != nil {
			return err
		}
		if response.Error != nil {
			return errors.New(*response.Error)
		}
		for _, f := range response.File {
			if err := os.WriteFile(filepath.Join(dir, f.GetName()), []byte(f.GetContent()), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}
