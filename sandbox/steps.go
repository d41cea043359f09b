package sandbox

// Steps names the steps of create, of destroy, and of clearing away what a
// destroy put off, in the order in which they are done, as [Config.Step] hears of them. A test that stops a daemon at each of
// them asks here, and so misses none that is added.
func Steps() (create, destroy, clear []string) {
	for _, s := range createSteps(Image{}) {
		create = append(create, s.name)
	}
	for _, s := range destroySteps {
		destroy = append(destroy, s.name)
	}
	for _, s := range clearSteps {
		clear = append(clear, s.name)
	}
	return create, destroy, clear
}
