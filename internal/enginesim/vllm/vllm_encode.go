package vllm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// The encoder's side of E-P-D, with the ECExampleConnector. Encoders write
// their results into a directory, under the hash of a part and of the request's
// processing options. The other engines load a result from there, or encode the
// part themselves if it is absent
// (vllm/distributed/ec_transfer/ec_connector/example_connector.py). Only an
// engine of role encode stops before it samples (v1/core/sched/scheduler.py
// is_encoder_only).

// ecFile is the connector's file name for a part.
const ecFile = "encoder_cache.safetensors"

// ecItem is one image or sound of a request.
type ecItem struct {
	hash string
	data []byte // stands for the embeddings
}

// ecItems lists the parts of a chat request that an encoder processes.
func ecItems(req *core.Request) []ecItem {
	var messages []struct{ Content json.RawMessage }
	if json.Unmarshal(req.Fields["messages"], &messages) != nil {
		return nil
	}
	var items []ecItem
	for _, m := range messages {
		var parts []json.RawMessage
		if json.Unmarshal(m.Content, &parts) != nil {
			continue
		}
		for _, raw := range parts {
			var part struct{ Type string }
			json.Unmarshal(raw, &part)
			switch part.Type {
			case "image_url", "audio_url", "input_audio":
				var data bytes.Buffer
				json.Compact(&data, raw)
				data.Write(req.Fields["mm_processor_kwargs"])
				sum := sha256.Sum256(data.Bytes())
				items = append(items, ecItem{hex.EncodeToString(sum[:]), data.Bytes()})
			}
		}
	}
	return items
}

// encode processes a request's parts: an encoder writes their results, any
// other engine loads the existing ones.
func (v *VLLM) encode(req *core.Request) []ecItem {
	items := ecItems(req)
	for _, item := range items {
		file := filepath.Join(v.e.Cfg.ECDir, item.hash, ecFile)
		if v.e.Cfg.Role != core.RoleEncode && v.e.Cfg.ECDir != "" {
			if data, err := os.ReadFile(file); err == nil && bytes.Equal(data, item.data) {
				v.e.Stats.EncoderHits.Add(1)
				continue
			}
		}
		v.e.Stats.Encoded.Add(1)
		if v.e.Cfg.Role == core.RoleEncode {
			if err := writeWhole(file, item.data); err != nil {
				v.e.Cfg.Log.Error("save encoder cache", "error", err)
			}
		}
	}
	return items
}

// writeWhole writes a file so that no reader sees an incomplete one.
func writeWhole(file string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o777); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(file), "part")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(f.Name(), file)
	}
	return err
}

// runEncoder runs a sequence in an encoder: it processes the prompt and samples
// nothing.
func (v *VLLM) runEncoder(ctx context.Context, s *core.Sequence) error {
	if err := s.Rank.Reserve(ctx, s, len(s.Prompt), true); err != nil {
		return err
	}
	if err := s.Rank.Prefill(ctx, s); err != nil {
		return err
	}
	list := []any{}
	for _, item := range v.encode(s.Req) {
		list = append(list, core.Obj("mm_hash", item.hash, "image_grid_thw", []int{1, 2, 2}))
	}
	s.Finish, s.EcParams = "stop", core.Obj("ec_items", list)
	return nil
}
