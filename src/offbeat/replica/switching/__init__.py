"""Another algorithm in place: the agreement of all ranks, schedules, and the choice by figures."""
