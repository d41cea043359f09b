package sandbox

// SeccompArg is a condition of the profile.
type SeccompArg = arg

// SeccompGroup is a group of the profile, for tests of its data.
type SeccompGroup struct {
	Name, Reason, Action string
	Names, Legacy        []string
	Match                [][]SeccompArg
}

// SeccompGroups lists all groups.
func SeccompGroups() []SeccompGroup {
	var out []SeccompGroup
	for _, g := range append(allowGroups(), answerGroups()...) {
		out = append(out, SeccompGroup{g.Name, g.Reason, g.Action, g.Names, g.Legacy, g.Match})
	}
	return out
}

// Except32 admits what does not equal, as the kernel looks at it.
var Except32 = except32
