package sandboxtest

var scripts = map[string]Program{}
