package boxed

import "time"

// EventType says what happened. New types may be added.
type EventType string

// The events.
const (
	EventCreated   EventType = "sandbox.created" // admitted
	EventQueued    EventType = "sandbox.queued"  // waits for its turn to be made
	EventStarted   EventType = "sandbox.started" // running
	EventUpdated   EventType = "sandbox.updated"
	EventPaused    EventType = "sandbox.paused"
	EventResumed   EventType = "sandbox.resumed"
	EventStopped   EventType = "sandbox.stopped"
	EventFailed    EventType = "sandbox.failed"
	EventExec      EventType = "exec.started"
	EventExecEnd   EventType = "exec.ended"
	EventSSH       EventType = "ssh.started" // a session over SSH; Message says what and from where
	EventSSHEnd    EventType = "ssh.ended"
	EventEgressAsk EventType = "egress.ask"      // a connection waits for its owner; Question names it, Message the host
	EventEgressEnd EventType = "egress.answered" // or nobody did in time
	EventImage     EventType = "image.pull"      // progress of a pull
	EventNodeWarn  EventType = "node.warning"

	// What a node sees of the others, and what an operator does with it.
	EventNodeUp       EventType = "node.up"
	EventNodeSilent   EventType = "node.silent"
	EventNodeStopped  EventType = "node.stopped"
	EventNodeCordoned EventType = "node.cordoned" // Message says by whom
	EventNodeDrained  EventType = "node.drained"  // nothing is left on it
)

// Cursor is a place in the stream of events. It is opaque; "" is now, and
// [CursorOldest] the oldest event that is kept.
type Cursor string

// CursorOldest starts at the oldest event that is kept.
const CursorOldest Cursor = "oldest"

// Event is one thing that happened to one sandbox or node.
type Event struct {
	Cursor  Cursor    `json:"cursor"`
	Type    EventType `json:"type"`
	At      time.Time `json:"at"`
	Node    NodeID    `json:"node"`
	Sandbox ID        `json:"sandbox,omitempty"`
	Owner   string    `json:"owner,omitempty"`
	Exec    ExecID    `json:"exec,omitempty"`
	State   State     `json:"state,omitempty"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	// QueuePlace is where a queued sandbox stands; 1 is the next.
	QueuePlace int         `json:"queue_place,omitempty"`
	Question   string      `json:"question,omitempty"` // of an EventEgressAsk, for EgressReply
	Status     *ExitStatus `json:"status,omitempty"`
}
