// Command scorer-go is a scorer: engines in the zone with the cheapest electricity have the score 1,
// and engines where a kWh costs twice as much have 0.5. The configuration has the prices of the zones.
package main

import (
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/guest"
)

// prices has the price of a kWh by the LabelID of the zone.
var prices = make(map[uint32]float32)

func init() {
	guest.Score("cheap_power", score, abi.NeedDetails) // without this need, engines have no labels
	guest.OnConfigure(configure)
}

func main() {}

// configure reads prices such as "north=0.08 south=0.24". The proxy does not use the plugin if the
// result is false.
func configure(config string) (ok bool) {
	for _, entry := range strings.Fields(config) {
		zone, text, _ := strings.Cut(entry, "=")
		price, err := strconv.ParseFloat(text, 32)
		if zone == "" || err != nil || price <= 0 {
			return false
		}
		prices[abi.LabelID(zone)] = float32(price)
	}
	return len(prices) > 0
}

// score leaves the score 0 for engines without a known price.
func score(f *abi.ScoreFacts, to *abi.Scores) {
	least := float32(0)
	for i, open := range f.Open {
		if p := price(f, i); open && p > 0 && (least == 0 || p < least) {
			least = p
		}
	}
	for i, open := range f.Open {
		if p := price(f, i); open && p > 0 {
			to.Rows[i] = abi.RowScore{Score: least / p, Value: p} // pdproxy explain shows the value
		}
	}
}

// price returns the price at the engine of a row; 0: not known.
func price(f *abi.ScoreFacts, row int) float32 {
	if row >= len(f.Details) { // a host that is older than the need
		return 0
	}
	return prices[f.Details[row].Zone]
}
