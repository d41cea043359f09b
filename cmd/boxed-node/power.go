package main

import (
	"os"
	"path/filepath"
	"strings"
)

// powerLabel is the label of a machine with a battery, powerMains or powerBattery:
// work can be kept off a laptop that is on its way.
const (
	powerLabel   = "power"
	powerMains   = "mains"
	powerBattery = "battery"
)

// powerSupplies is where Linux shows them.
const powerSupplies = "/sys/class/power_supply"

// power is what this machine runs on; "" where it has no battery.
func power(dir string) string {
	supplies, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	read := func(name, file string) string {
		text, _ := os.ReadFile(filepath.Join(dir, name, file))
		return strings.TrimSpace(string(text))
	}
	battery, mains := false, false
	for _, s := range supplies {
		switch read(s.Name(), "type") {
		case "Battery":
			// One of a mouse says that it is a device's.
			battery = battery || read(s.Name(), "scope") != "Device"
		case "Mains", "USB":
			mains = mains || read(s.Name(), "online") == "1"
		}
	}
	switch {
	case !battery:
		return ""
	case mains:
		return powerMains
	}
	return powerBattery
}

// liveLabels are the node's labels with those that change by themselves.
func (c *Config) liveLabels() map[string]string {
	p := power(powerSupplies)
	if _, set := c.Labels[powerLabel]; set || p == "" {
		return c.Labels
	}
	labels := map[string]string{powerLabel: p}
	for k, v := range c.Labels {
		labels[k] = v
	}
	return labels
}
