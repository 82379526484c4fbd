package node

import "drover.io/drover/api"

// TakeAny has the door take any device for that of a volume: the tests' are the kernel's loop devices.
func (s *Server) TakeAny() *Server {
	s.isOf = func(device, api.UID) bool { return true }
	return s
}
