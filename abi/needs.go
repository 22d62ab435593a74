package abi

import (
	"errors"
	"strconv"
	"strings"
)

// PolicyNeeds are the needs of one policy in addition to those of its module.
type PolicyNeeds struct {
	Hook  Hook
	Name  string
	Needs Needs
}

// ParsePolicyNeeds reads the text of ExportPolicyNeeds: a hook, a name and the
// bits as a decimal number in each line.
func ParsePolicyNeeds(text string) ([]PolicyNeeds, error) {
	var list []PolicyNeeds
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) == 3 {
			hook, known := ParseHook(fields[0])
			bits, err := strconv.ParseUint(fields[2], 10, 64)
			if known && err == nil {
				list = append(list, PolicyNeeds{hook, fields[1], Needs(bits)})
				continue
			}
		}
		return nil, errors.New("read needs: " + strconv.Quote(strings.TrimSpace(line)) + " is not a hook, a name and a number")
	}
	return list, nil
}
