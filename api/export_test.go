package api

// CheckBody checks a JSON body against an operation ("POST /v1/sandboxes"), for
// the benchmark and the fuzz test.
func CheckBody(op string, raw []byte) error {
	doc, err := loadDocument()
	if err != nil {
		return err
	}
	_, err = check[execCallOrSpec](doc.operations[op], raw)
	return err
}

type execCallOrSpec struct{ execCall }

// Held is what requests hold beyond what is free.
func (s *Server) Held() int64 {
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	return s.cfg.MaxHeld - s.memory.left
}
